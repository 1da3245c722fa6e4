"""Every mixer of the workspace, trained and measured under one rule; `README.md` says which."""
