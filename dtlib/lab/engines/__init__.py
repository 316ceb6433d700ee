"""The engines behind notebooks: start them, attach to them, end them."""
