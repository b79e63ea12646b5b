"""What every command needs: run files, user functions, run folders, models ready to act."""
