"""The command `holdfast`, also as `python -m holdfast`.

The node and the command line are in the extra `server`. Without it, this says so; with it, holdfast.cli does the rest.
"""

import sys

from holdfast import AssertsDisabled


def main() -> None:
    try:
        from holdfast.cli.main import main as command
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "holdfast":
            raise  # A broken installation of ours, not a missing extra.
        sys.stderr.write(
            f"holdfast: the node and the command line are not installed ({error.name} is missing): "
            "pip install 'holdfast[server]'\n"
        )
        sys.exit(2)
    except AssertsDisabled as error:
        sys.stderr.write(f"holdfast: {error}\n")
        sys.exit(2)
    command()


if __name__ == "__main__":
    main()
