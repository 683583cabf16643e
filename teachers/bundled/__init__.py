"""Small teachers that ship with the package."""
