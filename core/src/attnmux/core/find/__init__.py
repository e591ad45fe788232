"""What this process finds: settings, plugins that they admit, and devices. No torch."""
