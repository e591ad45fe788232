"""Discovery: installed plugins, and the devices that their probes report."""
