"""The `holdfast` command."""

assert __name__ == "holdfast.cli", f"import holdfast.cli, not {__name__}"
