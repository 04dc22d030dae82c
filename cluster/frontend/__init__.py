"""The gateway and its gRPC and HTTP servers: text to tokens and back, stop strings, API keys."""
