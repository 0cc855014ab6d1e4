"""Pure functions that judge a run: statistics over runs and prompts, diversity of images, gradient noise."""
