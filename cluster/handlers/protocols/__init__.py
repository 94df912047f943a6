"""The protocols that handlers speak, one package each, behind one interface.

A protocol discovers what an endpoint offers, connects to it and carries attempts there (`handlers.attempts.Carrier`).
Endpoint and invoker implement the queue, backoff, bounds and large values for every protocol.
"""
