"""The web console, served by the admin API of cluster.

Nothing is here yet; ARCHITECTURE.md says what will be.
"""

assert __name__ == "holdfast.console", f"import holdfast.console, not {__name__}"
