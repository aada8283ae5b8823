from lumina_ft.app import main

if __name__ == "__main__":
    main()
