"""Names the files that a configuration refers to and that are not here; what they set stays undecided."""

from skill_tools.configs.config import Config


def notes(config: Config) -> tuple[str, ...]:
    """Return one line for each."""
    return tuple(
        f"{setting.place.file}:{setting.place.line} {setting.written}={setting.value}: no such file beside it or "
        "in the working folder, so what it sets is unknown"
        for setting in config.missing_files
    )
