"""The servers that clients speak to, and the gateway behind them: text to tokens and back, stop strings, keys."""
