"""Holdfast's own handler protocol (docs/protocol.md): frames on a WebSocket, or one request per attempt."""
