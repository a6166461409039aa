"""The small integers of a pool that serves one request: for serve tests, checked without a server.

tests/upstream/test_step_traffic.py compares it with recorded steps of the product.
"""

ID_AND_POSITION, POSITION, ROW_NUMBER, COUNT = 16, 8, 8, 8  # bytes, int64


def metadata_bytes(
    node: int, owner: int, num_nodes: int, *, own_rows: int, all_rows: int, prompt_steps: int
) -> int:
    """What one rank of `node` sends of kind "metadata" for one request on `owner`.

    Args:
        own_rows: rows of this node in all steps (on slots, decode steps have one on every node).
        all_rows: rows of all nodes in all steps.
        prompt_steps: chunks of the prompt; SGLang asks for one row of logits in each.
    """
    head = num_nodes - 1
    inputs = ID_AND_POSITION * own_rows if node > 0 else 0  # to the first root alone
    positions = POSITION * all_rows if node < head else 0  # with the handoff
    # Two rounds of logits, the last one empty; each tells every other node one count.
    rounds = 2 * COUNT * (num_nodes - 1)
    asked = ROW_NUMBER if node == owner != head else 0
    return inputs + positions + prompt_steps * (rounds + asked)
