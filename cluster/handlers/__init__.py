"""From effects to the handlers of users, and back."""
