"""Images that cannot be used: they are named and counted, and above a limit the run ends."""

from dataclasses import dataclass, field

from cl_train.errors import BadImageError


@dataclass
class BadImages:
    """The bad samples of both splits: `reasons` by name, each once.

    `skipped` counts how often one was replaced or left out.
    """

    skip: bool
    limit: int = field(repr=False)
    setting: str = field(default="", repr=False)  # where the limit comes from
    search: str = field(default="", repr=False)  # the command that finds all
    remedy: str = field(default="data.on_bad_image=skip", repr=False)
    reasons: dict[str, str] = field(default_factory=dict)
    skipped: int = 0

    def add(self, name: str, reason: str, *, skipped: bool) -> None:
        """Records a sample; `skipped`: it was read for its own row, not in the place of another.

        Raises BadImageError: without `skip`, or above `limit`.
        """
        self.skipped += skipped
        self.reasons[name] = reason
        if not self.skip:
            all_of_them = f"; to find all: {self.search}" if self.search else ""
            raise BadImageError(
                f"'{name}' cannot be used: {reason}. Repair or remove it, or use"
                f" {self.remedy}{all_of_them}"
            )
        if len(self.reasons) > self.limit:
            raise BadImageError(
                f"{len(self.reasons)} images cannot be used, more than"
                f" data.max_bad_images={self.setting or self.limit}; the last one: '{name}':"
                f" {reason}"
            )
