"""Agent frameworks on Holdfast: one module and one extra for each, on top of the SDK.

    pip install 'holdfast[pydantic-ai]'
    from holdfast.ext.pydantic_ai import HoldfastDurability

Each uses the framework's own extension point, and does nothing outside of a handler.
"""

assert __name__ == "holdfast.ext", f"import holdfast.ext, not {__name__}"
