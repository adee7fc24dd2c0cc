"""What the user asked for and what was decided from it, as typed values. No torch here."""
