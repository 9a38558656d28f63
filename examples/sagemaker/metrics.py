"""What the service reads from the lines of a job: names and regular expressions, at most 40."""

NUMBER = r"(-?[0-9.]+)"
METRICS = {
    "train:step": r"^[0-9:]+ step ([0-9]+)/",
    "train:reward": rf"^[0-9:]+ step [0-9]+/.* reward {NUMBER}",
    "train:loss": rf"loss of step [0-9]+: {NUMBER}",
    "train:rollouts_per_second": rf"^[0-9:]+ step [0-9]+/.* {NUMBER} rollouts/s",
    "train:staleness": rf"^[0-9:]+ step [0-9]+/.* staleness {NUMBER}",
    "train:trainer_waits_percent": r"^[0-9:]+ step [0-9]+/.* trainer waits ([0-9]+)%",
    "eval:success_rate": rf"evaluation of version [0-9]+: success rate {NUMBER}",
    "eval:reward": rf"evaluation of version [0-9]+: .*mean reward {NUMBER}",
}
