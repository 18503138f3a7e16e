"""What scripts/sweep.sh, run_recipes.sh and verdict.sh share: options, the trainer's command, and runs in a folder."""
