"""Values -> what people or programs read."""
