"""What plans exist: graph, dimension rules, layouts, meshes, schedules, plans and programs.  No torch."""
