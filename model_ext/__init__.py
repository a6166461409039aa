"""How a step runs over nodes: the model side of TKNP."""
