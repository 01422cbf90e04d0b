"""describe (being written)."""


def describe(optimizer):
    raise RuntimeError("being written")
