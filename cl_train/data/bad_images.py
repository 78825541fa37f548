"""Handling of samples that cannot be read: count and name them, or end the run."""


class BadImageError(RuntimeError):
    """A sample cannot be read (on_bad_image=error), or more than data.max_bad_images cannot (on_bad_image=skip)."""


class BadImages:
    """The bad samples of a run, of both splits.

    Attributes:
        reasons: name -> why it cannot be read, each file once, in the order in which they were found.
        skipped: how often a bad sample was skipped, over all epochs.
    """

    def __init__(self, *, skip: bool, limit: int) -> None:
        self._skip, self._limit = skip, limit
        self.reasons: dict[str, str] = {}
        self.skipped = 0

    def add(self, name: str, reason: str) -> None:
        """Raises BadImageError unless bad samples are skipped and at most `limit` different ones have been found."""
        self.skipped += 1
        self.reasons[name] = reason
        if not self._skip:
            advice = "Repair or remove it, or use data.on_bad_image=skip"
            raise BadImageError(f"'{name}' cannot be decoded: {reason}. {advice}")
        if len(self.reasons) > self._limit:
            raise BadImageError(
                f"{len(self.reasons)} images cannot be decoded, more than data.max_bad_images={self._limit};"
                f" the last one: '{name}': {reason}"
            )
