"""The engine: a synchronous core that schedules blocks and tokens. It knows no device, no clock and no I/O."""
