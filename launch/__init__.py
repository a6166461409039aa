"""How a user starts TKNP: models, quick start, checks before a launch."""
