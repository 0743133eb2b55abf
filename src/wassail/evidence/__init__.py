"""Evidence packs: an evaluation with its question, its limits and the commands that look again."""
