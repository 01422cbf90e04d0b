"""transformers Trainer plug-in (being written)."""


def install() -> None:
    pass
