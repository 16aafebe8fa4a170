"""``python -m jfp8.integrations.maxtext``: MaxText's pre-training, with what `enabled` adds."""

from absl import app
from maxtext.trainers.pre_train import train

from jfp8.integrations.maxtext.enabled import enabled


def main(argv: list[str]) -> None:
    """Run ``maxtext.trainers.pre_train.train`` with the same arguments."""
    with enabled():
        train.main([train.__file__, *argv[1:]])


if __name__ == "__main__":
    app.run(main)
