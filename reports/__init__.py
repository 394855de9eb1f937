"""Numbers -> what people look at: text for the terminal, figures, pages. Knows nothing of where the numbers come from."""
