"""Private storage of the engines that one `vllm serve --data-parallel-size` starts, all with the same settings."""

from tpu_offload import OffloadConfig


def with_storage_of_engine(config: OffloadConfig, number: int) -> OffloadConfig:
    """The settings with a place of its own in each private tier, below the one that is set; the first engine has that.

    Args:
      config: the settings of all engines.
      number: of the engine, from 0.
    """
    if number == 0 or not (config.storage_tier and config.storage_options):
        return config
    given = zip(config.storage_tier, config.storage_options, strict=True)
    options = tuple(_below(text, name, f"engine-{number}") for name, text in given)
    return config.model_copy(update={"storage_options": options})


def _below(options: str, name: str, folder: str) -> str:
    """The options with a folder below the directory or prefix; those of shared tiers, and of others, as they are."""
    end = {"file": ",", "object": "?"}.get(name)
    if end is None or options.startswith("memory:"):
        return options
    place, separator, rest = options.partition(end)
    if not place.strip():  # an error in each engine
        return options
    return f"{place.strip().rstrip('/')}/{folder}{separator}{rest}"
