"""Names, members and keywords of the installed torch, against those here."""
