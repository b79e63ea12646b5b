"""Settings of environments: the protocol, the tools and the limits of tool agents."""
