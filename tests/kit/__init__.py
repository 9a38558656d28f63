"""What tests share: tiny trainers, runs, fakes and waits. Imported as `kit`, whose folder is on the path of pytest."""
