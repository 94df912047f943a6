"""The protocols that handlers speak, one package each.

A protocol connects to an endpoint and carries attempts there (`handlers.attempts.Carrier`). Queue, backoff, bounds and large
values are the endpoint's and the invoker's business, whatever the protocol.
"""
