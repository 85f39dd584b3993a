"""The pipeline of a recipe: its six stages, what is skipped, resumed or redone, and how training is launched."""
