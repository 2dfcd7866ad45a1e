"""Commands of this repository and the small modules they share. Not part of the installed package."""
