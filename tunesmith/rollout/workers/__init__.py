"""Workers run groups: in this process, or on another rank."""
