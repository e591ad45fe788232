"""`attnmux report`: one file about a machine and its backends, without private names."""
