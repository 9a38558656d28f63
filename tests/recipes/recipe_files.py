"""Loads a recipe by its file name, as a user's file is loaded: it is part of no package."""

import importlib.util
from pathlib import Path
from types import ModuleType

RECIPES = Path(__file__).parents[2] / "src" / "app"


def load_recipe(file_name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file_name).stem, RECIPES / file_name)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe
