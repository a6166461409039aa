"""A published number beside a computed one, and whether they agree."""

from dataclasses import dataclass

HOLDS = "holds"  # the tolerance of an order


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One published number."""

    id: str
    claim: str
    published: str
    computed: float
    low: float  # what passes
    high: float
    tolerance: str
    source: str  # where it is published
    fitted: bool = False
    error: float | None = None  # relative; None for bounds and orders

    @property
    def passes(self) -> bool:
        return self.low <= self.computed <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A published number that this planner does not reproduce."""

    claim: str
    published: str
    computed: str
    why: str


def near(
    number: str,
    claim: str,
    published: float,
    computed: float,
    percent: float,
    source: str,
    *,
    fitted: bool = False,
) -> Check:
    """A number within some percent of the published one."""
    room = published * percent / 100
    return Check(
        id=number,
        claim=claim,
        published=f"{published:g}",
        computed=computed,
        low=published - room,
        high=published + room,
        tolerance=f"{percent:g} %",
        source=source,
        fitted=fitted,
        error=computed / published - 1,
    )


def rounds(number: str, claim: str, published: str, computed: float, source: str) -> Check:
    """A number that rounds to the published digits."""
    half = 0.5 * 10 ** -len(published.partition(".")[2])
    return Check(
        id=number,
        claim=claim,
        published=published,
        computed=computed,
        low=float(published) - half,
        high=float(published) + half,
        tolerance="rounding",
        source=source,
        error=computed / float(published) - 1,
    )


def between(
    number: str, claim: str, published: str, computed: float, low: float, high: float, source: str
) -> Check:
    """A number between two bounds."""
    return Check(
        id=number,
        claim=claim,
        published=published,
        computed=computed,
        low=low,
        high=high,
        tolerance=f"{low:g} to {high:g}",
        source=source,
    )


def holds(number: str, claim: str, true: bool, source: str) -> Check:
    """An order that the paper shows: computed is 1 if it holds."""
    return Check(
        id=number,
        claim=claim,
        published="holds",
        computed=float(true),
        low=1,
        high=1,
        tolerance=HOLDS,
        source=source,
    )
