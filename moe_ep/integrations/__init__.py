"""Other training frameworks on our dispatchers. Importing this package imports none of them."""
