"""Device graphs of a model's step: `runner.py` captures and replays, `devices.py` says on what."""
