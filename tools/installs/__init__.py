"""What pip makes of this project: documented lines, versions of Python, engines and extras."""
