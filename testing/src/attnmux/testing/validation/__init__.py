"""`attnmux validate`: whether a plugin's distribution is well made, without a device."""
