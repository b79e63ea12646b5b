"""What the page shows, as values that JSON can hold; each function takes an opened run and returns one answer."""
