"""Wire formats of the two vendors: requests from JSON, replies to JSON and server-sent events, errors."""
