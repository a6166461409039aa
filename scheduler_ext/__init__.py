"""Which owner holds which request: the scheduler and controller side of TKNP."""
