"""What other processes import, and what changes modules there, is not collected here."""

collect_ignore_glob = ["planted*.py"]
