"""The shapes of the bodies of the admin API: see `cluster.schemas`. Those that other rooms build are declared there."""
