"""A hand-written recording of the demo."""

from demo.recording import Recording, Run, Step, Take


def take(steps: list[tuple[float, str]]) -> Take:
    """Each letter is a token; its id is its position."""
    return Take(
        tuple(Step(at, tuple(letters)) for at, letters in steps),
        tuple(range(sum(len(letters) for _, letters in steps))),
        "length",
    )


TAKE = take([(0.2, "a"), (0.3, "bcd"), (0.4, "ef"), (0.5, "g")])
PLAIN = take([(0.1 * (i + 1), letter) for i, letter in enumerate("abcdefg")])
RUN = Run("p0", "Say [/] & <this>", 0, PLAIN, TAKE)
RECORDING = Recording(
    "target",
    "drafter",
    "2 cores",
    tuple(Run(f"p{i}", f"prompt {i}", t, PLAIN, TAKE) for t in (0, 0.7) for i in range(3)),
)
