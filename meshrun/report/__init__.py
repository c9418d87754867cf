"""Values -> texts, tables, JSON and pictures for people and programs."""
