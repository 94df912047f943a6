"""The web console, served by the admin API of cluster.

Its files are static: the pages that use them are in cluster/admin/pages.py.
"""

assert __name__ == "holdfast.console", f"import holdfast.console, not {__name__}"
